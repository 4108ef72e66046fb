export { Holdfast, holdfast } from "./holdfast.ts";
export type { Migrated } from "./core/routine.ts";
export type { HoldfastOptions, MigrationState, TryLockResult } from "./holdfast.ts";
export { key, shared } from "./core/key.ts";
export type { Key, KeyPart, Lockable, LockMode, LockRequest } from "./core/key.ts";
export { sql } from "./core/sql.ts";
export type { Statement } from "./core/sql.ts";
export type { LockOptions, NestedOptions, Transaction } from "./core/scope.ts";
export type { TransactionOptions } from "./core/transaction.ts";
export type { OwnRetryOptions, RetryOptions } from "./core/retry.ts";
export type {
  ClientTraits,
  Connection,
  Database,
  DriverError,
  Engine,
  Failure,
  Isolation,
  Pinned,
  QueryLock,
  Result,
  Room,
  Row,
  Seen,
  SqlConnection,
  Violated,
  Wait,
} from "./core/database.ts";
export { capabilityMeanings, shownCapability } from "./core/capabilities.ts";
export type { Capabilities, Strategy, Support, Unsupported } from "./core/capabilities.ts";
export type { BesideMode } from "./core/beside.ts";
export type { FailureInfo } from "./core/failure.ts";
export type { Events, OrderStep, Traced, Traces } from "./core/events.ts";
export type { HazardKind } from "./core/section.ts";
export type { HazardMode, SlowOptions } from "./watch/options.ts";
export type { LockView, Session } from "./core/inspect.ts";
export type { Inspection, WaitChain } from "./watch/inspect.ts";
export type { Held } from "./locks/hold.ts";
export { rows } from "./core/rows.ts";
export type {
  AllOptions,
  LockedRows,
  OrderBy,
  QueryOptions,
  QueryRows,
  RowKey,
  RowKeys,
  RowOptions,
  RowsItem,
  TableName,
  TableOptions,
} from "./core/rows.ts";
export type { RowStrength, TableMode, Where } from "./core/tables.ts";
export type { LeaseInfo } from "./core/leases.ts";
export { fenced } from "./locks/lease.ts";
export type { Lease, LeaseFilter, LeaseOptions } from "./locks/lease.ts";
export type { AcquireOptions, Permit, Semaphore, SemaphoreOptions } from "./locks/semaphore.ts";
export { leader } from "./locks/leader.ts";
export type { Leader, LeaderOptions, Leadership, Lessor } from "./locks/leader.ts";
export { versioned } from "./locks/version.ts";
export type { Versioned, VersionedOptions } from "./locks/version.ts";
export { once } from "./locks/once.ts";
export type { OnceOptions, OnceResult } from "./locks/once.ts";
export { changeStrategy, strategyOf } from "./locks/strategy.ts";
export type { AgreedStrategy, ChangeStrategyOptions, ChangedStrategy } from "./locks/strategy.ts";
export { sharded } from "./sharded.ts";
export type { Sharded } from "./sharded.ts";
export { failureOf, isLockTimeout, isRetryable, isUniqueViolation } from "./core/failure.ts";
export {
  AccessDeniedError,
  CommitUnknownError,
  ConnectionLostError,
  DeadlineExceededError,
  DeadlockError,
  FileBusyError,
  HazardError,
  HoldfastError,
  LeaseLostError,
  LockLostError,
  LockNotAvailableError,
  LockTimeoutError,
  NoConnectionError,
  NotInTransactionError,
  OutcomeUnknownError,
  OnceError,
  PoolExhaustedError,
  ReplicaError,
  RowsMissingError,
  SchemaMissingError,
  SerializationError,
  ServerFullError,
  ServerUnavailableError,
  ServerTooOldError,
  ShardError,
  ShardMapError,
  StaleFenceError,
  StaleVersionError,
  StatementError,
  StrategyError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
  WrongConnectionError,
} from "./core/errors.ts";
export type { Blocked, Holder } from "./core/errors.ts";
