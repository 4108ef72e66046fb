/** The tables of quotas: what their rows mean is said in `quota/decide/rows.ts`. */
import { table } from "../table.ts";

export const quotaBuckets = table({
  name: "quota_bucket",
  columns: {
    id: "serial",
    quota: "text",
    subject: "text",
    used: "integer",
    held: "integer",
    credit: "integer",
    version: "integer",
    reset: "integer",
    since: "moment?",
    parts: "integers?",
    own_limit: "integer?",
    plan: "text?",
    rolled: "integer?",
    moves: "integer?",
    moved_to: "integer?",
    moved_from: "integer?",
  },
  key: ["quota", "subject"],
});

export const quotaLines = table({
  name: "quota_line",
  columns: {
    bucket: "integer",
    version: "integer",
    kind: "text",
    id: "text",
    entry: "text?",
    amount: "integer",
    delta: "integer?",
    forgotten: "integer?",
    refunded: "integer?",
    used: "integer",
    held: "integer?",
    credit: "integer?",
    max: "integer?",
    since: "moment?",
    at: "moment",
    first: "integer?",
    drains: "json?",
    details: "json?",
  },
  key: ["bucket", "version"],
  unique: [["bucket", "id"]],
});

export const quotaHolds = table({
  name: "quota_hold",
  columns: { quota: "text", subject: "text", id: "text", amount: "integer", until: "moment" },
  key: ["quota", "subject", "id"],
});

export const quotaGrants = table({
  name: "quota_grant",
  columns: {
    quota: "text",
    subject: "text",
    id: "text",
    amount: "integer",
    spent: "integer",
    priority: "integer",
    until: "moment",
  },
  key: ["quota", "subject", "id"],
});

export const quotaTables = [quotaBuckets, quotaLines, quotaHolds, quotaGrants] as const;
