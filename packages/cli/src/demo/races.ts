import { cron } from "./cron.ts";
import { jobs } from "./jobs.ts";
import { lastItem } from "./last-item.ts";
import { quota } from "./quota.ts";
import type { Race } from "./race.ts";
import { transfers } from "./transfers.ts";

/** In the order in which they are shown. */
export const races: readonly Race[] = [quota, lastItem, transfers, jobs, cron];
