"""Draws three pictures of the documents as SVG, without a library for pictures.

python docs/pictures.py objectives docs/objectives.svg
python docs/pictures.py passes docs/passes.svg out-passes/*
python docs/pictures.py sudoku docs/sudoku.svg out-sudoku-1337 out-sudoku-1 out-sudoku-2 out-sudoku-3 out-sudoku-4
"""

import itertools
import math
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.data import masked_positions
from core.distributions import draw_uniforms
from core.errors import Mistake, UsageError, run_script
from core.files import METRICS, SAMPLES, each_metrics, each_record, writing
from core.fill_in_passes import fill_in_passes
from core.models import load_model, load_tokenizer
from grpo.evaluation.samples import evaluations
from grpo.report.page import ticks

# Mean and sd over five seeds at commit ebb0306; bench/objectives.py compares the objectives of today
TASKS = ("right sums", 0.377), ("valid words", 0.434)  # and before training
OBJECTIVES = {
    "grpo": ((0.562, 0.026), (0.458, 0.008)),
    "dr_grpo": ((0.551, 0.047), (0.460, 0.005)),
    "dapo": ((0.535, 0.030), (0.457, 0.007)),
    "bnpo": ((0.543, 0.016), (0.461, 0.006)),
    "gspo": ((0.489, 0.027), (0.451, 0.008)),
    "cispo": ((0.484, 0.056), (0.459, 0.008)),
    "rloo": ((0.536, 0.049), (0.464, 0.007)),
    "reinforce++": ((0.532, 0.045), (0.453, 0.005)),
    "reinforce++_baseline": ((0.524, 0.051), (0.459, 0.004)),
    "plain": ((0.543, 0.041), (0.463, 0.007)),
}
STYLE = """
svg { --page: #fff; --text: #1c1e21; --soft: #5f6670; --line: #dfe3e8; --given: #eef1f4; --mark: #2563eb;
  --wrong: #dc2626; }
@media (prefers-color-scheme: dark) { svg { --page: #15171a; --text: #e6e8eb; --soft: #9aa3ad; --line: #333940;
  --given: #262b31; --mark: #6ea8fe; --wrong: #f87171; } }
text { font: 12px system-ui, sans-serif; fill: var(--soft); text-anchor: middle; dominant-baseline: central; }
.page { fill: var(--page); } .title { font-size: 14px; fill: var(--text); } .end { text-anchor: end; }
path { fill: none; stroke: var(--line); } .before { stroke: var(--soft); stroke-dasharray: 4 3; }
.mean { stroke: var(--mark); stroke-width: 1.8; } .band { fill: var(--mark); stroke: none; opacity: .2; }
circle { fill: var(--mark); } rect { fill: var(--given); stroke: var(--line); }
.digit { font: 15px ui-monospace, monospace; fill: var(--text); }
.drawn .digit { fill: var(--mark); font-weight: bold; } .drawn rect { fill: var(--page); }
.wrong .digit { fill: var(--wrong); } .wrong rect { stroke: var(--wrong); }
"""
PASSES, SECONDS, FIRST, EACH = 4, 8, 14, 14  # of the loop; the first pass after FIRST percent of it, then every EACH
WHOLE = 5.5  # seconds into the loop, when the boards are whole: there it begins, for previews that show its first frame
BOARD, CELL = 4, 26                          # digits in a line of a board; their size
SEED = 1
OF_PASSES = "word_validity", "words_recovered", "gold_judge", "distinct_words"  # metrics of the table of passes


def svg(width, height, drawn, style=STYLE):
    """A picture as text."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
            f'<style>{style}</style><rect class="page" width="{width}" height="{height}" rx="8"/>\n{drawn}</svg>\n')


def label(x, y, words, kind=""):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>\n'


def scale(low, high, first, last):
    """The function that puts numbers from low to high at places from first to last."""
    return lambda number: round(first + (last - first) * (number - low) / (high - low), 1)


def draw_objectives():
    """Mean and deviation of every objective, in a panel for each task."""
    drawn, bottom = "", 46 + 20 * len(OBJECTIVES)
    for row, name in enumerate(OBJECTIVES):
        drawn += label(150, 50 + 20 * row, name, "end")
    for panel, (task, before) in enumerate(TASKS):
        found = [numbers[panel] for numbers in OBJECTIVES.values()]
        low = min([before, *(mean - sd for mean, sd in found)])
        high = max(mean + sd for mean, sd in found)
        left = 170 + 300 * panel
        across = scale(low, high, left, left + 270)
        drawn += label(left + 135, 18, f"{task}, five seeds", "title")
        for number in ticks(low, high):
            drawn += f'<path d="M{across(number)} 38V{bottom}"/>' + label(across(number), bottom + 12, f"{number:g}")
        drawn += f'<path class="before" d="M{across(before)} 38V{bottom}"/>' + label(across(before), 32, "before")
        for row, (mean, sd) in enumerate(found):
            y = 50 + 20 * row
            drawn += f'<path class="mean" d="M{across(mean - sd)} {y}H{across(mean + sd)}"/>'
            drawn += f'<circle cx="{across(mean)}" cy="{y}" r="4"/>\n'
    return svg(760, bottom + 28, drawn)


def sample(checkpoint, puzzle, count=4):
    """Samples of a puzzle, drawn as in training: [[(digit, pass that drew it, or 0)]] of its characters."""
    model, _ = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    ids = [tokenizer.mask_token_id if x == "_" else tokenizer.encode(x)[0] for x in puzzle]
    input = torch.tensor([ids])                                                      # (1, T)
    position, hidden = masked_positions(input == tokenizer.mask_token_id, input.device)
    noise = draw_uniforms(SEED, 0, [0], (2, count, len(ids)))
    target, _, turn, *_ = fill_in_passes(model, input, position, hidden, noise[:, 0], noise[:, 1], PASSES)
    samples = []
    for tokens, turns in zip(target.tolist(), turn.tolist(), strict=True):           # (count, M) each
        cells = [(x, 0) for x in puzzle]
        for place, token, i in zip(position[0].tolist(), tokens, turns, strict=True):
            cells[place] = tokenizer.decode([token]), i + 1
        samples.append(cells)
    return samples


def conflicts(board):
    """The cells of a board (a list of lines) whose digit stands twice in a row, a column or a quarter."""
    found = set()
    cells = [(i, j) for i in range(BOARD) for j in range(BOARD)]
    for (i, j), (y, x) in itertools.permutations(cells, 2):
        together = i == y or j == x or (i // 2, j // 2) == (y // 2, x // 2)
        if together and board[i][j] == board[y][x]:
            found.add((i, j))
    return found


def draw_board(cells, left, top):
    """A board whose digits appear pass by pass. cells: of `sample`"""
    text = "".join(digit for digit, _ in cells)
    wrong, drawn = conflicts(text.split("\n")), ""
    for n, (digit, turn) in enumerate(cells):
        i, j = divmod(n, BOARD + 1)
        if digit == "\n":
            continue
        x, y = left + CELL * j, top + CELL * i
        square = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'
        number = label(x + CELL / 2, y + CELL / 2, digit, "digit")
        if turn:
            kind = "drawn wrong" if (i, j) in wrong else "drawn"
            drawn += square + f'<g class="{kind} pass{turn}">{square}{number}</g>'
        else:
            drawn += square + number
    middle, end = BOARD * CELL / 2, BOARD * CELL
    return drawn + f'<path class="half" d="M{left + middle} {top}v{end}M{left} {top + middle}h{end}"/>\n'


def draw_curve(runs, metric, left, top, width, height):
    """Mean and deviation of a held-out metric over runs, and a dashed line at the start."""
    by_step = {}
    for folder in runs:
        for record in each_record(os.path.join(folder, METRICS)):
            if metric in record:
                by_step.setdefault(record["step"], []).append(record[metric])
    across, down = scale(0, max(by_step), left, left + width), scale(0, 1, top + height, top)
    points = [(across(step), *mean_and_sd(values)) for step, values in by_step.items()]
    band, line = curve(points, down, "mean")
    start = down(statistics.mean(by_step[0]))
    drawn = "".join(label(across(step), top + height + 12, step) for step in ticks(0, max(by_step)))
    for y in ticks(0, 1):
        drawn += f'<path d="M{left} {down(y)}h{width}"/>' + label(left - 6, down(y), f"{y:g}", "end")
    drawn += band + f'<path class="before" d="M{left} {start}h{width}"/>'
    drawn += label(left + width - 24, start + 10, "before") + label(left + width / 2, top + height + 28, "step")
    return drawn + line + "\n"


def mean_and_sd(values):
    """The mean of the values of several runs, and their standard deviation, 0 for a single run."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), sd


def curve(points, down, kind):
    """The paths of the band of one standard deviation, and of the curve. points: [(x, mean, sd)]"""
    upper = [f"{x} {down(mean + sd)}" for x, mean, sd in points]
    lower = [f"{x} {down(mean - sd)}" for x, mean, sd in reversed(points)]
    middle = [f"{x} {down(mean)}" for x, mean, _ in points]
    band = f'<path class="band" d="M{"L".join(upper + lower)}Z"/>'
    return band, f'<path class="{kind}" d="M{"L".join(middle)}"/>'


def style_of_passes():
    """The style of boards whose digits appear pass by pass, in a loop that begins with whole boards."""
    style = STYLE + ".half { stroke: var(--soft); }\n"
    for i in range(1, PASSES + 1):
        start = FIRST + EACH * (i - 1)
        style += (f".pass{i} {{ animation: pass{i} {SECONDS}s -{WHOLE}s infinite; }}\n"
                  f"@keyframes pass{i} {{ 0%, {start}% {{ opacity: 0; }} {start + 4}%, 96% {{ opacity: 1; }} "
                  "100% { opacity: 0; } }\n")
    return style + "@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }\n"


def draw_sudoku(runs):
    """Samples of a held-out puzzle before and after training, pass by pass, and the share of correct boards."""
    first = runs[0]
    puzzles = [record["problem"] for record in each_record(os.path.join(first, SAMPLES))]
    if not puzzles:
        raise Mistake(f"{first} holds no samples; name the out_dir of a run of config/grpo_sudoku.py")
    puzzle = max(puzzles, key=lambda x: x.count("_"))
    drawn = ""
    after = os.path.join(first, "model.safetensors")
    models = {"before": "data/sudoku/pretrained/generator.safetensors", "after": after}
    for place, (when, checkpoint) in enumerate(models.items()):
        left = 20 + 256 * place
        drawn += label(left + 112, 20, f"{when} training", "title")
        for n, cells in enumerate(sample(checkpoint, puzzle)):
            drawn += draw_board(cells, left + n % 2 * 120, 40 + n // 2 * 120)
    drawn += label(680, 20, f"correct boards, {len(runs)} seeds", "title")
    return svg(810, 284, drawn + draw_curve(runs, "eval/reward/sudoku", 570, 40, 220, 200), style_of_passes())


def measured_in_passes(folders):
    """Reads runs without training, in folders WHEN-PASSES-SEED such as before-16-1337. Raises Mistake.

    Returns {when: {passes: [held-out metrics of each seed]}}, "before" first
    """
    found = {"before": {}}
    for folder in folders:
        when, *numbers = os.path.basename(folder.rstrip("/")).split("-")
        records = evaluations(each_metrics(os.path.join(folder, METRICS)))
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or len(records) != 1:
            raise Mistake(f"{folder} must be a run with --max_iters=0, in a folder such as before-16-1337 (name, "
                          "passes, seed)")
        for metric in OF_PASSES:
            if records[0].get(f"eval/{metric}") is None:
                raise Mistake(f"{folder} did not measure {metric}: run it with both judges, by this version")
        by_passes = found.setdefault(when, {})
        by_passes.setdefault(int(numbers[0]), []).append(records[0])
    passes = found["before"].keys()
    if len(passes) < 2 or any(by_passes.keys() != passes for by_passes in found.values()):
        raise Mistake("each name must have the same numbers of passes as before-..., two or more: name more folders")
    return found


def measured(records, metric):
    """Mean and standard deviation of a held-out metric over runs."""
    return mean_and_sd([record[f"eval/{metric}"] for record in records])


def print_passes(found):
    """Prints a table for each metric: a row for each number of passes, a column for each name."""
    for metric in OF_PASSES:
        print(f"| {metric}, passes |", " | ".join(found), "|")
        print("|---" * (1 + len(found)) + "|")
        for passes in sorted(found["before"]):
            cells = []
            for by_passes in found.values():
                mean, sd = measured(by_passes[passes], metric)
                cells.append(f"{mean:.3f} ± {sd:.3f}" if sd else f"{mean:.3f}")
            print(f"| {passes} |", " | ".join(cells), "|")


def draw_passes(found):
    """Valid words against the number of denoising passes: mean and sd over seeds, a curve for each name."""
    numbers = {}
    for when, by_passes in found.items():
        for passes, records in by_passes.items():
            numbers[when, passes] = measured(records, "word_validity")
    passes = sorted(found["before"])
    seeds = max(len(records) for by_passes in found.values() for records in by_passes.values())
    across = scale(math.log2(passes[0]), math.log2(passes[-1]), 60, 400)
    low = min(mean - sd for mean, sd in numbers.values())
    high = max(mean + sd for mean, sd in numbers.values())
    down = scale(low, high, 250, 40)
    drawn = label(230, 18, f"valid words, {seeds} seeds after training", "title") + label(230, 282, "denoising passes")
    for y in ticks(low, high):
        drawn += f'<path d="M60 {down(y)}H400"/>' + label(54, down(y), f"{y:.2f}", "end")
    for number in passes:
        drawn += label(across(math.log2(number)), 266, number)
    for when in found:
        kind = "before" if when == "before" else "mean"
        points = [(across(math.log2(number)), *numbers[when, number]) for number in passes]
        drawn += "".join(curve(points, down, kind))
        last, _ = numbers[when, passes[-1]]
        drawn += label(436, down(last), when)
    return svg(480, 300, drawn)


def main(argv):
    """Reads the command line and writes a picture."""
    match argv:
        case ["objectives", path]:
            picture = draw_objectives()
        case ["sudoku", path, _, *_]:
            picture = draw_sudoku(argv[2:])
        case ["passes", path, _, *_]:
            found = measured_in_passes(argv[2:])
            print_passes(found)
            picture = draw_passes(found)
        case _:
            raise UsageError("python docs/pictures.py objectives FILE, sudoku FILE FOLDER..., or passes FILE FOLDER...")
    with writing(path), open(path, "w") as f:
        f.write(picture)


if __name__ == "__main__":
    run_script(main)
