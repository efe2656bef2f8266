"""What the policy writes, for people: masked text, best and worst completion."""

import json
import os

from core.logger import highlight


def best_and_worst(text, scores, problems, tokenizer):
    """The first few problems of an evaluation with their best and worst completion.

    text: (P, G, T); scores: (P, G); problems: [(input, target, mask, noise)]
    Returns a list of plain records
    """
    records = []
    for i, (input, target, mask, _) in enumerate(problems[: len(scores)]):
        best, worst = int(scores[i].argmax()), int(scores[i].argmin())
        texts = {"masked": input, "truth": target, "best": text[i, best], "worst": text[i, worst]}
        records.append({name: tokenizer.decode(ids.tolist()) for name, ids in texts.items()}
                       | {"best_score": round(float(scores[i, best]), 4), "mask": mask.int().tolist(),
                          "worst_score": round(float(scores[i, worst]), 4)})
    return records


def format_samples(records, color):
    lines = []
    for r in records:
        lines.append(f"  masked       | {highlight(r['masked'], r['mask'], False)}")
        lines.append(f"  best   {r['best_score']:.3f} | {highlight(r['best'], r['mask'], color)}")
        lines.append(f"  worst  {r['worst_score']:.3f} | {highlight(r['worst'], r['mask'], color)}")
    return "\n".join(lines)


def append_samples(out_dir, step, records):
    with open(os.path.join(out_dir, "samples.jsonl"), "a") as f:
        f.writelines(json.dumps({"step": step, **{k: v for k, v in r.items() if k != "mask"}}) + "\n" for r in records)


def comparison_table(before, after):
    """Metrics at the start and the end, a line each."""
    lines = [f"  {'held-out':<20}{'before':>9}{'after':>9}{'change':>9}"]
    for name in before:
        if name in after:
            lines.append(f"  {name.removeprefix('eval/'):<20}{before[name]:>9.4f}{after[name]:>9.4f}"
                         f"{after[name] - before[name]:>+9.4f}")
    return "\n".join(lines)
