"""Names of settings in other projects are answered as docs/coming_from.md has them."""

import re

import pytest

from core.config import UsageError, load_config
from core.settings.other_names import OTHER_NAMES
from grpo.grpo_config import GRPOConfig
from tests.test_docs import CODE, tables

ROWS = [cells for _, cells in tables("docs/coming_from.md")]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_an_unknown_name_of_another_project_gets_a_setting_of_its_row(name):
    rows = [row for row in ROWS if re.search(rf"(^|[ .,]){name}($|[,=])", row[0])]
    with pytest.raises(UsageError) as error:
        load_config(GRPOConfig, [f"--groups.{name}=1"])
    offered = re.search(r"did you mean (.*)\?", str(error.value))[1].split(" or ")
    assert rows and set(offered) <= set(CODE.findall(" ".join(row[1] + row[2] for row in rows))), offered
