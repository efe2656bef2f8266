"""The calculator as a class for TRL's environment_factory: its public methods are tools.

python grpo/train_grpo.py --environment=Multiply --environment_file=data/calculator/trl_tools.py \
    --reward_functions="('environment',)" --dataset=FILE --template=model --generator_checkpoint=FOLDER

FILE has records such as {"prompt": "What is 17*23?", "answer": "391"}. The chat template of the model in FOLDER must
say how to call tools, as those of Qwen 2.5 and 3 do.
"""


class Multiply:
    """The reward is 1 if the tool has returned the record's answer."""

    def reset(self, answer, **columns):
        self.answer, self.right = str(answer), 0.0

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The product.
        """
        product = int(a) * int(b)
        self.right = max(self.right, float(str(product) == self.answer))
        return product

    def get_reward(self):
        return self.right
