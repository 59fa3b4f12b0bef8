"""Named run configurations, data only; read through importlib.resources by `config/load.py`."""
