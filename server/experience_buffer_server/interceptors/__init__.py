"""What wraps every RPC: statuses from errors, and metrics."""

from experience_buffer_server.interceptors.boundary import BoundaryInterceptor

__all__ = ["BoundaryInterceptor"]
