from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("active", "limit_seconds")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    active: int
    limit_seconds: float
    def __init__(self, active: _Optional[int] = ..., limit_seconds: _Optional[float] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class GetTenantStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTenantStatisticsResponse(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatistics]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantStatistics, _Mapping]]] = ...) -> None: ...

class TenantStatistics(_message.Message):
    __slots__ = ("tenant", "active", "requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "sessions")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    active: int
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sessions: int
    def __init__(self, tenant: _Optional[str] = ..., active: _Optional[int] = ..., requests: _Optional[int] = ..., failed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...

class ListAllSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAllSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[TenantSession]
    def __init__(self, sessions: _Optional[_Iterable[_Union[TenantSession, _Mapping]]] = ...) -> None: ...

class TenantSession(_message.Message):
    __slots__ = ("tenant", "session_id", "tokens", "pages", "expires_in_seconds")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    tokens: int
    pages: int
    expires_in_seconds: float
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., tokens: _Optional[int] = ..., pages: _Optional[int] = ..., expires_in_seconds: _Optional[float] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("boundaries", "sessions", "pages", "bytes")
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    boundaries: int
    sessions: int
    pages: int
    bytes: int
    def __init__(self, boundaries: _Optional[int] = ..., sessions: _Optional[int] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "name", "overwrite")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    name: str
    overwrite: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., name: _Optional[str] = ..., overwrite: _Optional[bool] = ...) -> None: ...

class ExportSessionResponse(_message.Message):
    __slots__ = ("tokens", "bytes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    bytes: int
    def __init__(self, tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ImportSessionRequest(_message.Message):
    __slots__ = ("name", "tenant", "session_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    session_id: str
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ImportSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: TenantSession
    def __init__(self, session: _Optional[_Union[TenantSession, _Mapping]] = ...) -> None: ...

class ListSessionFilesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionFilesResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[SessionFile]
    def __init__(self, files: _Optional[_Iterable[_Union[SessionFile, _Mapping]]] = ...) -> None: ...

class SessionFile(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
