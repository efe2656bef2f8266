"""The metrics and extra columns that rewards log besides their values."""

import math
from dataclasses import dataclass, field

from core.settings.user_code import one_line


@dataclass
class Log:
    """The metrics {name: (sum, count)} and extra columns {name: list of N} that rewards log besides their values."""
    metrics: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)

    def log_metric(self, name, value):
        """Adds to the mean that is logged under this name; a value that is not finite is left out of it."""
        if math.isfinite(value):
            self.add_sum(one_line(name), float(value), 1)  # its name is shown on a terminal

    def log_extra(self, column, values):
        """Adds values to a column of the samples: in the end, one for each completion of the call."""
        self.columns.setdefault(one_line(column), []).extend(values)

    def add(self, other, name=""):
        """Adds the log of another reward, of this name, for the same completions. A column that is already there
        becomes name/column."""
        for column, values in other.columns.items():
            if column in self.columns:
                column = f"{name}/{column}"
            self.columns[column] = values
        for metric, (total, count) in other.metrics.items():
            self.add_sum(metric, total, count)

    def add_sum(self, metric, total, count):
        """Adds a sum of `count` values to a metric."""
        before, number = self.metrics.get(metric, (0.0, 0))
        self.metrics[metric] = (before + total, number + count)

    def extra(self, i):
        """{column: value} of completion i."""
        return {column: values[i] for column, values in self.columns.items()}

    @classmethod
    def join(cls, parts):
        """The logs of calls with different completions, [(number of completions, Log)], as that of one call. A column
        is None where a call did not log it."""
        joined = cls()
        columns = dict.fromkeys(column for _, log in parts for column in log.columns)
        for n, log in parts:
            joined.add(cls(log.metrics))
            for column in columns:
                joined.log_extra(column, log.columns.get(column, [None] * n))
        return joined
