"""Source of the Grafana dashboards beside this folder; `python -m boards` there writes them anew."""
