export { type Exceeded, QuotaError, QuotaExceededError } from "./errors.ts";
export { type SubjectInfo, quotas, subjects } from "./list.ts";
export {
  type Denied,
  type EntryOptions,
  type Grant,
  type GrantOptions,
  type Granted,
  type HistoryEntry,
  type Pruned,
  type HoldOptions,
  type Quota,
  type QuotaHold,
  type QuotaOptions,
  type QuotaSet,
  type QuotaStanding,
  type Reconciliation,
  type Subject,
  quota,
} from "./quota.ts";
export type { Older } from "../input/older.ts";
export type { Trust } from "../input/trust.ts";
export type { Unit } from "../time/units.ts";
export type { Period } from "../time/windows.ts";
export type { QuotaInfo } from "./store.ts";
