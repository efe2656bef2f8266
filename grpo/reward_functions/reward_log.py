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
        name = one_line(name)  # it is shown on a terminal
        value = float(value)
        if math.isfinite(value):
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + value, count + 1)

    def log_extra(self, column, values):
        """Adds values to a column of the samples: in the end, one for each completion of the call."""
        self.columns.setdefault(one_line(column), []).extend(values)

    def add(self, other, name=""):
        """Adds the log of another reward, of this name, for the same completions. A column that is already there
        becomes name/column."""
        for column, values in other.columns.items():
            self.columns[f"{name}/{column}" if column in self.columns else column] = values
        for metric, (total, count) in other.metrics.items():
            before = self.metrics.get(metric, (0.0, 0))
            self.metrics[metric] = (before[0] + total, before[1] + count)

    def extra(self, i):
        """{column: value} of completion i."""
        return {column: values[i] for column, values in self.columns.items()}

    @classmethod
    def join(cls, parts):
        """The logs of calls with different completions, [(number of completions, Log)], as that of one call. A column
        is None where a call did not log it."""
        joined = cls()
        for _, log in parts:
            joined.add(cls(log.metrics))
        for column in dict.fromkeys(column for _, log in parts for column in log.columns):
            joined.columns[column] = [x for n, log in parts for x in log.columns.get(column, [None] * n)]
        return joined
