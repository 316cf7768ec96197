"""One HTML page, or pictures, of one or several runs: `python -m neoproto.report RUN_DIR [RUN_DIR …]`.

    run folders ─reading─> RunData ─┬─ panels, series ─> curves   ─┐
                                    ├─ samples                    ─┼─page─> report.html
                                    └─ summary, topology          ─┘
                                    └─ pictures ─> PNG files

Nothing here is imported by a training run.
"""
