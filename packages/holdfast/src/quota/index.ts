export { type Exceeded, QuotaError, QuotaExceededError } from "./errors.ts";
export { type SubjectInfo, quotas, subjects } from "./list.ts";
export { quota } from "./define.ts";
export type { Quota } from "./quota.ts";
export type { QuotaSet } from "./set.ts";
export type {
  Denied,
  EntryOptions,
  Grant,
  GrantOptions,
  Granted,
  HistoryEntry,
  Pruned,
  HoldOptions,
  QuotaHold,
  QuotaOptions,
  QuotaStanding,
  Reconciliation,
  Subject,
} from "./types.ts";
export type { Older } from "../input/older.ts";
export type { Trust } from "../input/trust.ts";
export type { Unit } from "../time/units.ts";
export type { Period } from "../time/windows.ts";
export type { QuotaInfo } from "./store.ts";
