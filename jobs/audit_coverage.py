"""audit_coverage."""

from jobs.common.config import Section
from jobs.common.main import main
from jobs.common.runs import Report, Run


class Settings(Section):
    """The [audit_coverage] section."""

    section = "audit_coverage"


def run(run: Run, settings: Settings) -> Report:
    """PLACEHOLDER."""
    return Report()


if __name__ == "__main__":
    main("audit_coverage")
