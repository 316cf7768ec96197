"""The documented path of jobs of started workers, which saved jobs name; see `meshes.monarch.workers_job`."""

from meshes.monarch.workers_job import WorkersJob, mesh_addresses, mesh_sizes, use_client_address

__all__ = ["WorkersJob", "mesh_addresses", "mesh_sizes", "use_client_address"]
