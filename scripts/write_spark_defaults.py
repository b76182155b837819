"""Gives the virtual environment's own Spark the Delta jars, so that a plain `spark-submit jobs/NAME.py` works."""

from pathlib import Path

import pyspark

from jobs.common.session import DELTA_EXTENSION, PROJECT


def main() -> None:
    jars = ",".join(str(jar) for jar in sorted((PROJECT / ".jars").glob("*.jar")))
    folder = Path(pyspark.__file__).parent / "conf"
    folder.mkdir(exist_ok=True)
    (folder / "spark-defaults.conf").write_text(
        "# Written by scripts/setup.sh, for this machine alone: spark-submit --properties-file replaces it whole.\n"
        f"spark.jars {jars}\n"
        f"spark.sql.extensions {DELTA_EXTENSION}\n"
        "spark.sql.catalog.spark_catalog org.apache.spark.sql.delta.catalog.DeltaCatalog\n"
        "spark.driver.memory 3g\n"
        "spark.driver.host 127.0.0.1\n"
        "spark.driver.bindAddress 127.0.0.1\n"
        "spark.ui.enabled false\n"
        "spark.ui.showConsoleProgress false\n",
        encoding="utf-8",
    )
    # Errors only, and none of Spark's greetings.
    (folder / "log4j2.properties").write_text(
        "rootLogger.level = error\n"
        "rootLogger.appenderRef.console.ref = console\n"
        # Where the two levels differ, Spark says so at every start.
        "logger.pyspark.name = org.apache.spark.api.python.PythonGatewayServer\n"
        "logger.pyspark.level = error\n"
        "appender.console.type = Console\n"
        "appender.console.name = console\n"
        "appender.console.target = SYSTEM_ERR\n"
        "appender.console.layout.type = PatternLayout\n"
        "appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex{3}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
