/**
 * The functions of queues. Each is one round trip. Whoever waits for rows that others may hold takes them in this order,
 * so that no two wait for each other: leases, then keys by name, then groups by name, each kind once. Jobs and workers
 * are passed over if somebody has them.
 */
import type { Statement } from "../../../seam/sql.ts";
import { open, add, know, again } from "./functions/adding.ts";
import { due, soon, tend, claim, unknown, choose, look } from "./functions/claiming.ts";
import { finish, unmarked, settled, complete, free, freeKeys, sweep, giveBack } from "./functions/ending.ts";
import { take, takeOne, settle } from "./functions/transactional.ts";
import { pause, revive, discard, prune, count } from "./functions/administration.ts";

export const queueRoutines: readonly Statement[] = [
  open,
  know,
  add,
  again,
  due,
  soon,
  tend,
  unknown,
  choose,
  claim,
  pause,
  unmarked,
  settled,
  finish,
  complete,
  free,
  freeKeys,
  sweep,
  giveBack,
  take,
  takeOne,
  settle,
  revive,
  discard,
  prune,
  count,
  look,
];
