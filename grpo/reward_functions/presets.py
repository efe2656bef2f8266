"""The presets of rewards for kinds of tasks, by task_type."""

PRESETS = {
    "fill_in": ("judge",),
    "math": ("math_format", "math_answer", "math_number"),
    "code": ("code_correctness", "length_penalty"),
    "general": ("length_penalty",),
    "reasoning": ("math_format", "length_penalty")}
PRESET_TEMPLATE = {"math": "math", "reasoning": "math", "code": "code"}  # {task_type: template}
PRESET_SUCCESS = {"math": "math_answer", "reasoning": "math_format"}  # {task_type: its success reward}
