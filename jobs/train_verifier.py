"""train_verifier."""

from jobs.common.config import Section
from jobs.common.main import main
from jobs.common.runs import Report, Run


class Settings(Section):
    """The [train_verifier] section."""

    section = "train_verifier"


def run(run: Run, settings: Settings) -> Report:
    """PLACEHOLDER."""
    return Report()


if __name__ == "__main__":
    main("train_verifier")
