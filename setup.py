"""Packaging. `pip install .` gives the snapshot reader (numpy and pyarrow); `pip install .[pipeline]` everything."""

from pathlib import Path

from setuptools import setup

PIPELINE = [
    "pyspark==4.2.0",
    "delta-spark==4.4.0",
    "torch==2.13.0",
    "faiss-cpu==1.15.1",
    "pandas>=2.3,<3",
    "pydantic>=2.9",
    "safetensors>=0.5",
    "typer>=0.15",
    "rich>=13",
    "jinja2>=3.1",
    "matplotlib>=3.9",
]
AIRFLOW = [
    "apache-airflow==3.3.2",
    "psutil>=5.9",
    "apache-airflow-providers-apache-spark==6.3.4",
    # The provider pulls pyspark-client, which installs into pyspark's own folder: the two must be the same version.
    "pyspark-client==4.2.0",
]
REDIS = ["redis>=5", "hiredis>=3"]
S3 = ["boto3>=1.36"]
FAST = ["numba>=0.61"]

setup(
    name="solaris-pipeline",
    version="0.1.0",
    description="Precomputes foundation-model embeddings for the pairs a ranker will score soon, served by lookup",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        "jobs",
        "jobs.common",
        "schemas",
        "solaris_udf",
        "solaris_udf.snapshot",
        "solaris_udf.foundation",
        "solaris_udf.world",
    ],
    package_data={"jobs.common": ["templates/*"], "solaris_udf": ["py.typed"]},
    install_requires=["numpy>=1.26", "pyarrow>=17"],
    extras_require={
        "pipeline": PIPELINE,
        "airflow": AIRFLOW,
        "redis": REDIS,
        "s3": S3,
        "fast": FAST,
        "dev": [
            *PIPELINE,
            *AIRFLOW,
            *REDIS,
            *FAST,
            *S3,
            "moto[s3]>=5",  # the S3 server of the object-store tests, with flask
            "flask>=3",
            "flask-cors>=5",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "selenium>=4.30",  # the browser test, where chromium and chromedriver are installed
            "hypothesis>=6",
            "ruff>=0.9",
            "mypy>=1.14",
            "pandas-stubs",
            "types-redis",
        ],
    },
    entry_points={"console_scripts": ["solaris = jobs.__main__:main"]},
)
