"use strict";
// Charts: wherever the pointer is in one of them, all show their values at the step nearest to it.
const charts = [...document.querySelectorAll("svg")].map(svg => {
  const [left, right, bottom, last] = svg.dataset.plot.split(" ").map(Number);
  const lines = [...svg.parentNode.querySelectorAll("b")].map(text => ({
    text, steps: text.dataset.steps.split(",").map(Number), values: text.dataset.values.split(",")}));
  const [mark, label] = ["path", "text"].map(name => document.createElementNS(svg.namespaceURI, name));
  label.setAttribute("y", bottom + 20);
  svg.append(mark, label);
  const showStep = step => { // null: the last value of each line, without a mark
    const places = lines.map(({steps}) => steps.reduce((best, x, i) => // of the nearest point
      step === null || Math.abs(x - step) <= Math.abs(steps[best] - step) ? i : best, 0));
    lines.forEach(({text, values}, i) => { text.textContent = values[places[i]]; });
    const shown = lines[0].steps[places[0]], x = left + (right - left) * shown / last;
    mark.setAttribute("d", step === null ? "" : `M${x} 0V${bottom}`);
    label.setAttribute("x", x);
    label.textContent = step === null ? "" : `step ${shown}`;
  };
  svg.addEventListener("pointerleave", () => charts.forEach(show => show(null)));
  svg.addEventListener("pointermove", ({clientX}) => {
    const box = svg.getBoundingClientRect(), x = (clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    charts.forEach(show => show(last * (x - left) / (right - left)));
  });
  return showStep;
});
// Samples: those of one evaluation at a time.
for (const slider of document.querySelectorAll(".slider")) {
  const [previous, range, next, output] = slider.children, sets = [...document.querySelectorAll(".set")];
  const show = number => {
    range.value = number; // the range keeps it between its ends
    sets.forEach((set, i) => { set.hidden = i !== Number(range.value); });
    output.textContent = sets[range.value].dataset.step;
  };
  range.max = sets.length - 1;
  range.addEventListener("input", () => show(range.value));
  previous.addEventListener("click", () => show(Number(range.value) - 1));
  next.addEventListener("click", () => show(Number(range.value) + 1));
  show(range.max);
}
