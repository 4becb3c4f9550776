"""The report: one self-contained page of a recording and of what the doctor found in it."""

from torch_ltc.debug.report.page import Report, report_html, write_report

__all__ = ["Report", "report_html", "write_report"]
