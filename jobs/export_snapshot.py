"""export_snapshot."""

from jobs.common.config import Section
from jobs.common.main import main
from jobs.common.runs import Report, Run


class Settings(Section):
    """The [export_snapshot] section."""

    section = "export_snapshot"


def run(run: Run, settings: Settings) -> Report:
    """PLACEHOLDER."""
    return Report()


if __name__ == "__main__":
    main("export_snapshot")
