"""What wraps every RPC: statuses from errors, and metrics."""

from experience_buffer_server.rpc.boundary import BoundaryInterceptor

__all__ = ["BoundaryInterceptor"]
