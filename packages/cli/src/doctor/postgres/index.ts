import type { Check } from "../check.ts";
import { deadLeases } from "../leases.ts";
import { ownChecks } from "../own.ts";
import { patternChecks } from "../patterns.ts";
import { activityChecks } from "./activity.ts";
import { agreedCheck } from "./agreed.ts";
import { connectionChecks } from "./connection.ts";
import { loadChecks } from "./load.ts";
import { postgresOwn, rowSecurityCheck } from "./own.ts";
import type { PostgresPatient } from "./patient.ts";
import { settingChecks } from "./settings.ts";
import { shortTimeouts } from "./short-timeouts.ts";
import { replicationSlots } from "./slots.ts";
import { tableChecks } from "./tables.ts";
import { wraparound } from "./wraparound.ts";

const leases = deadLeases<PostgresPatient>(
  (table) =>
    `SELECT name, holder, fence, extract(epoch FROM clock_timestamp() - until) * 1000 AS ms FROM ${table} WHERE NOT waiting AND token <> '' AND until < clock_timestamp() - interval '5 seconds'`,
);

/** What is happening now comes first: of what is equally bad, it is told first. */
export const postgresChecks: readonly Check<PostgresPatient>[] = [
  ...activityChecks,
  ...patternChecks,
  leases,
  agreedCheck,
  ...connectionChecks,
  ...settingChecks,
  shortTimeouts,
  ...loadChecks,
  replicationSlots,
  wraparound,
  ...tableChecks,
  rowSecurityCheck,
  ...ownChecks(postgresOwn),
];
