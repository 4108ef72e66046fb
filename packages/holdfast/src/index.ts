export { Holdfast, holdfast } from "./holdfast.ts";
export type { Migrated } from "./seam/routine.ts";
export type { HoldfastOptions, MigrationState, TryLockResult } from "./holdfast.ts";
export { key, shared } from "./seam/key.ts";
export type { Key, KeyPart, Lockable, LockMode, LockRequest } from "./seam/key.ts";
export { sql } from "./seam/sql.ts";
export type { Statement } from "./seam/sql.ts";
export type { LockOptions, NestedOptions, Transaction } from "./transaction/scope.ts";
export type { TransactionOptions } from "./transaction/transaction.ts";
export type { SyncBody, SyncOptions, SyncTransaction } from "./transaction/sync.ts";
export type { OwnRetryOptions, RetryOptions } from "./transaction/retry.ts";
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
} from "./seam/database.ts";
export { capabilityMeanings, shownCapability } from "./seam/capabilities.ts";
export type { Capabilities, Strategy, Support, Unsupported } from "./seam/capabilities.ts";
export type {
  /** @deprecated Called `WrongConnectionMode` now. */
  WrongConnectionMode as BesideMode,
  WrongConnectionMode,
} from "./transaction/wrong-connection.ts";
export type { FailureInfo } from "./seam/failure.ts";
export type { Events, OrderStep, Traced, Traces } from "./events/events.ts";
export type { HazardKind } from "./context/section.ts";
export type { HazardMode, SlowOptions } from "./watch/options.ts";
export type { LockView, Session } from "./seam/inspect.ts";
export type { Inspection, WaitChain } from "./watch/inspect.ts";
export type { Held } from "./locks/hold.ts";
export { rows } from "./seam/row-options.ts";
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
} from "./seam/row-options.ts";
export type { RowStrength, TableMode, Where } from "./seam/tables.ts";
export type { LeaseInfo } from "./seam/leases.ts";
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
export type { RenumberOptions, Sharded, ShardedOptions } from "./sharded.ts";
export { failureOf, isLockTimeout, isRetryable, isUniqueViolation } from "./seam/failure.ts";
export {
  AccessDeniedError,
  CommitUnknownError,
  ConnectionLostError,
  KilledError,
  DeadlineExceededError,
  DeadlockError,
  FileBusyError,
  FileReplacedError,
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
  RowsHiddenError,
  RowsMissingError,
  SchemaMissingError,
  SchemaTakenError,
  SerializationError,
  ServerFullError,
  ServerUnavailableError,
  ServerTooOldError,
  ShardError,
  ShardMapError,
  StaleFenceError,
  StaleVersionError,
  StatementError,
  StorageError,
  StrategyError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
  WrongConnectionError,
} from "./seam/errors.ts";
export type { Blocked, Holder } from "./seam/errors.ts";
