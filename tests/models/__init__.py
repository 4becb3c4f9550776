"""Whole trainings on the device against the same trainings on eager CPU."""
