export { Holdfast, holdfast } from "./holdfast.ts";
export type { HoldfastOptions, TryLockResult } from "./holdfast.ts";
export { key, shared } from "./core/key.ts";
export type { Key, KeyPart, Lockable, LockMode, LockRequest } from "./core/key.ts";
export { sql } from "./core/sql.ts";
export type { Statement } from "./core/sql.ts";
export type { LockOptions, NestedOptions, Transaction } from "./core/scope.ts";
export type { TransactionOptions } from "./core/transaction.ts";
export type { RetryOptions } from "./core/retry.ts";
export type {
  ClientTraits,
  Connection,
  Database,
  DriverError,
  Engine,
  Failure,
  Isolation,
  Pinned,
  Result,
  Row,
  SqlConnection,
  Wait,
} from "./core/database.ts";
export type { Capabilities, Strategy, Support, Unsupported } from "./core/capabilities.ts";
export type { Events } from "./core/events.ts";
export type { Held } from "./locks/hold.ts";
export { isRetryable, isUniqueViolation } from "./core/failure.ts";
export {
  CommitUnknownError,
  ConnectionLostError,
  DeadlineExceededError,
  DeadlockError,
  HoldfastError,
  LockLostError,
  LockNotAvailableError,
  LockTimeoutError,
  NoConnectionError,
  NotInTransactionError,
  ReplicaError,
  SchemaMissingError,
  SerializationError,
  ServerTooOldError,
  TransactionAbortedError,
  UnsupportedError,
  UsageError,
} from "./core/errors.ts";
export type { Blocked, Holder } from "./core/errors.ts";
