"""simulate_ab."""

from jobs.common.config import Section
from jobs.common.main import main
from jobs.common.runs import Report, Run


class Settings(Section):
    """The [simulate_ab] section."""

    section = "simulate_ab"


def run(run: Run, settings: Settings) -> Report:
    """PLACEHOLDER."""
    return Report()


if __name__ == "__main__":
    main("simulate_ab")
