import type { Check } from "../check.ts";
import { deadLeases } from "../leases.ts";
import { ownChecks } from "../own.ts";
import { patternChecks } from "../patterns.ts";
import { activityChecks } from "./activity.ts";
import { connectionChecks } from "./connection.ts";
import { loadChecks } from "./load.ts";
import type { MysqlPatient } from "./patient.ts";
import { settingChecks, snapshotIsolation } from "./settings.ts";
import { shortTimeouts } from "./short-timeouts.ts";
import { mysqlOwn, tableChecks } from "./tables.ts";

const leases = deadLeases<MysqlPatient>(
  (table) =>
    `SELECT name, holder, fence, TIMESTAMPDIFF(MICROSECOND, until, UTC_TIMESTAMP(6)) / 1000 AS ms FROM ${table} WHERE waiting = 0 AND token <> '' AND until < UTC_TIMESTAMP(6) - INTERVAL 5 SECOND`,
);

/** What is happening now comes first: of what is equally bad, it is told first. */
const now = [
  ...activityChecks,
  ...patternChecks,
  leases,
  ...connectionChecks,
  ...settingChecks,
  shortTimeouts,
];
const rest = [...loadChecks, ...tableChecks, ...ownChecks(mysqlOwn)];

export const mysqlChecks: readonly Check<MysqlPatient>[] = [...now, ...rest];

export const mariadbChecks: readonly Check<MysqlPatient>[] = [...now, snapshotIsolation, ...rest];
