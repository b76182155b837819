"""evaluate_uplift."""

from jobs.common.config import Section
from jobs.common.main import main
from jobs.common.runs import Report, Run


class Settings(Section):
    """The [evaluate_uplift] section."""

    section = "evaluate_uplift"


def run(run: Run, settings: Settings) -> Report:
    """PLACEHOLDER."""
    return Report()


if __name__ == "__main__":
    main("evaluate_uplift")
