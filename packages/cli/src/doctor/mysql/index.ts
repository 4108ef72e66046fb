import type { Check } from "../check.ts";
import { ownChecks } from "../own.ts";
import { activityChecks } from "./activity.ts";
import { connectionChecks } from "./connection.ts";
import { loadChecks } from "./load.ts";
import type { MysqlPatient } from "./patient.ts";
import { settingChecks, snapshotIsolation } from "./settings.ts";
import { mysqlOwn, tableChecks } from "./tables.ts";

const rest = [...activityChecks, ...loadChecks, ...tableChecks, ...ownChecks(mysqlOwn)];

export const mysqlChecks: readonly Check<MysqlPatient>[] = [...connectionChecks, ...settingChecks, ...rest];

export const mariadbChecks: readonly Check<MysqlPatient>[] = [
  ...connectionChecks,
  ...settingChecks,
  snapshotIsolation,
  ...rest,
];
