import { locks } from "./locks.ts";
import { queues } from "./queue.ts";
import { quotas } from "./quota.ts";
import { rows } from "./rows.ts";
import { stocks } from "./stock.ts";
import type { Suite } from "./suite.ts";

export const suites: readonly Suite[] = [locks, rows, quotas, stocks, queues];
