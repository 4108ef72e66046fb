import type { Check } from "../check.ts";
import { ownChecks } from "../own.ts";
import { activityChecks } from "./activity.ts";
import { connectionChecks } from "./connection.ts";
import { loadChecks } from "./load.ts";
import { postgresOwn } from "./own.ts";
import type { PostgresPatient } from "./patient.ts";
import { settingChecks } from "./settings.ts";
import { tableChecks } from "./tables.ts";

export const postgresChecks: readonly Check<PostgresPatient>[] = [
  ...connectionChecks,
  ...settingChecks,
  ...activityChecks,
  ...loadChecks,
  ...tableChecks,
  ...ownChecks(postgresOwn),
];
