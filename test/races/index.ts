/** All of them. A new flow is one file, and one line here. */
import { campaignBudget } from "./campaign-budget.ts";
import { cartBlob } from "./cart-blob.ts";
import { cartTotal } from "./cart-total.ts";
import { doubleBooking } from "./double-booking.ts";
import { evictedLock } from "./evicted-lock.ts";
import { exactBuilders } from "./exact-builders.ts";
import { exactDrivers } from "./exact-drivers.ts";
import { exactHoldfast } from "./exact-holdfast.ts";
import { exactOrms } from "./exact-orms.ts";
import { expiredLock } from "./expired-lock.ts";
import { finalize } from "./finalize.ts";
import { folderCycle } from "./folder-cycle.ts";
import { idempotency } from "./idempotency.ts";
import { invoiceNumber } from "./invoice-number.ts";
import { jobTwice } from "./job-twice.ts";
import { lastAdmin } from "./last-admin.ts";
import { likeCounter } from "./like-counter.ts";
import { lockOutside } from "./lock-outside.ts";
import { lostEvent } from "./lost-event.ts";
import { onMysql2 } from "./on-mysql2.ts";
import { oversell } from "./oversell.ts";
import type { Exact, Race } from "./race.ts";
import { readSkew } from "./read-skew.ts";
import { seatHold } from "./seat-hold.ts";
import { sessionLock } from "./session-lock.ts";
import { signUp } from "./sign-up.ts";
import { softDelete } from "./soft-delete.ts";
import { storeCreditScope } from "./store-credit.ts";
import { stuckLock } from "./stuck-lock.ts";
import { transferDeadlock } from "./transfer-deadlock.ts";
import { triggerLimit } from "./trigger-limit.ts";
import { twoCarts } from "./two-carts.ts";
import { uncheckedVersion } from "./unchecked-version.ts";
import { unlockTooEarly } from "./unlock-too-early.ts";
import { usernameCase } from "./username-case.ts";
import { voucher } from "./voucher.ts";
import { warehouses } from "./warehouses.ts";
import { webhook } from "./webhook.ts";

/** That somebody reported. */
const published: readonly Race[] = [
  voucher,
  oversell,
  cartTotal,
  finalize,
  storeCreditScope,
  expiredLock,
  evictedLock,
  sessionLock,
  stuckLock,
  twoCarts,
  signUp,
  webhook,
  doubleBooking,
  cartBlob,
];

/** That somebody will. */
const others: readonly Race[] = [
  lastAdmin,
  invoiceNumber,
  warehouses,
  lostEvent,
  unlockTooEarly,
  folderCycle,
  jobTwice,
  idempotency,
  uncheckedVersion,
  seatHold,
  campaignBudget,
  likeCounter,
  softDelete,
  transferDeadlock,
  lockOutside,
  usernameCase,
  triggerLimit,
  readSkew,
];

export const races: readonly Race[] = [...published, ...others, ...onMysql2];
export const exact: readonly Exact[] = [...exactDrivers, ...exactBuilders, ...exactOrms, ...exactHoldfast];
