"""Measuring, recording and comparing."""
