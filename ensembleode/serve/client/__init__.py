"""The clients of a service."""

from .client import AsyncClient as AsyncClient, Client as Client, ServiceError as ServiceError
