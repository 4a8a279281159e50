"""The report: its records, and views of them for people."""

from autopallas.report.records import SCHEMA_VERSION, Failure, NearMiss, Pass, Rematerialised, Report, Site

__all__ = ["SCHEMA_VERSION", "Failure", "NearMiss", "Pass", "Rematerialised", "Report", "Site"]
