"""The documented path of jobs of started workers, which saved jobs name; see `meshes.monarch.workers_job`."""

from meshes.monarch.workers_job import WorkersJob

__all__ = ["WorkersJob"]
