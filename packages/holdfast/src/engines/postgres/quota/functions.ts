/**
 * The functions of quotas. A call is one statement that calls one function: it locks the buckets in one order,
 * and decides in statements that come after the locks, and so see what the last holder of each wrote. Without it, a
 * duplicate that had to wait for the original would meet a full bucket, and be told that it was refused.
 */
import type { Statement } from "../../../seam/sql.ts";
import { amend, peek } from "./functions/amending.ts";
import { drain, entries, late, leaves, reap, roll, room } from "./functions/buckets.ts";
import { batch, use } from "./functions/consuming.ts";
import { decide } from "./functions/deciding.ts";
import { check, mend, reconcile, rollUp } from "./functions/upkeep.ts";

export const quotaRoutines: readonly Statement[] = [
  entries,
  roll,
  reap,
  drain,
  late,
  room,
  leaves,
  decide,
  batch,
  use,
  amend,
  peek,
  check,
  mend,
  reconcile,
  rollUp,
];
