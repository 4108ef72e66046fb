/**
 * The functions of stock. A call is one statement that calls one function: it locks the levels in one order, and decides in
 * statements that come after the locks, and so see what the last holder of each wrote. (A duplicate that had to wait for the
 * original is then found, and not told that there is nothing left.)
 */
import type { Statement } from "../../../seam/sql.ts";
import { decide } from "./functions/deciding.ts";
import { follow } from "./functions/following.ts";
import { entries, levelAt, levels, minimum } from "./functions/levels.ts";
import { apply, move, order } from "./functions/moving.ts";
import { adopt, atOwnTable, guard, open, ownTable } from "./functions/own-table.ts";
import { mend, repair } from "./functions/repairing.ts";

export const stockRoutines: readonly Statement[] = [
  entries,
  levelAt,
  ownTable,
  atOwnTable,
  adopt,
  decide,
  apply,
  move,
  order,
  follow,
  minimum,
  mend,
  repair,
  levels,
  open,
  guard,
];
