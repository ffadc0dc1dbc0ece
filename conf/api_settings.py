"""The settings of the admin API: where it is served, and what its callers may do."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, IPvAnyNetwork, SecretStr, model_validator

from conf.setting_types import PositiveMillis, Section


class ApiSettings(Section):
    """Where the admin API is served, and the limits of its calls."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8081
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    answer_timeout_millis: PositiveMillis = 10_000
    max_ids_per_call: Annotated[int, Field(gt=0, le=100_000)] = 1_000
    max_matched_per_filter: Annotated[int, Field(gt=0, le=1_000_000)] = 1_000_000
    max_body_bytes: Annotated[int, Field(gt=0)] = 1 << 20
    max_connections: Annotated[int, Field(ge=10)] = 1_000
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    rate_limit: Annotated[str, Field(pattern=r"^[1-9]\d{0,8}/(second|minute|hour|day)$")] | None = "1000/second"
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[^\s/:\[\]]+$")], ...] = ()
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()

    @model_validator(mode="after")
    def _certificate_with_key(self) -> ApiSettings:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together")
        return self


class Operation(StrEnum):
    """An operation that a role may do. ADMIN includes all others, and SKIP includes ACKNOWLEDGE.

    DELIVER: to have messages delivered at another time, at once, or once more. SCHEDULE: to send messages.
    """

    SKIP = "skip"
    ACKNOWLEDGE = "acknowledge"
    CANCEL = "cancel"
    DELIVER = "deliver"
    SCHEDULE = "schedule"
    READ = "read"
    ADMIN = "admin"


class Role(Section):
    """The operations and topics of a role; `*` in a role or topic stands for any characters."""

    role: Annotated[str, Field(min_length=1)]
    operations: Annotated[tuple[Operation, ...], Field(min_length=1)]
    topics: Annotated[tuple[Annotated[str, Field(pattern=r"^(\*|persistent://\S+)$")], ...], Field(min_length=1)]


PublicAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"]


class AuthSettings(Section):
    """The authentication of the admin API's callers, with the keys and claims of Pulsar's tokens, and their roles."""

    enabled: bool = False
    token_secret_key: SecretStr | None = None
    token_public_key: str | None = None
    token_public_alg: PublicAlgorithm = "RS256"  # noqa: S105
    token_auth_claim: Annotated[str, Field(min_length=1)] = "sub"  # noqa: S105
    token_audience_claim: str | None = None
    token_audience: str | None = None
    roles: tuple[Role, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> AuthSettings:
        if self.enabled and (self.token_secret_key is None) == (self.token_public_key is None):
            raise ValueError("enabled needs either token_secret_key or token_public_key")
        if (self.token_audience_claim is None) != (self.token_audience is None):
            raise ValueError("token_audience_claim and token_audience go together")
        return self
