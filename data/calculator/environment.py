"""A calculator: <calc>17*23</calc> is answered by 391. A turn without a call is the answer to the problem."""

import re

from grpo.environments import environment

OPEN = "<calc>"
CALL = re.compile(OPEN + r"\s*([0-9]{1,9})\s*([-+*])\s*([0-9]{1,9})\s*")
NUMBER = re.compile(r"-?[0-9]+")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@environment
class Calculator:
    """The reward is 1 if the last number of the answer is the record's."""

    metrics = ("calls",)

    def __init__(self):
        self.calls = 0, 1

    def reset(self, record):
        self.answer = record["answer"]

    def step(self, text):
        if OPEN not in text:
            numbers = NUMBER.findall(text)
            return None, float(numbers[-1:] == [self.answer])
        self.calls = self.calls[0] + 1, 1
        call = CALL.fullmatch(text[text.rindex(OPEN) :])
        if call is None:
            return "error", 0.0
        a, sign, b = call.groups()
        return str(OPERATIONS[sign](int(a), int(b))), 0.0
