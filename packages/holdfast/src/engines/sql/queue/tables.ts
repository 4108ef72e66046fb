/**
 * Tables of queues. What waits is only inserted and deleted; what is worked on is one row for each batch that was claimed (a
 * lease), with the jobs in it. Numbers are given by sequences, and never used twice.
 */
import { type RowOf, type Table, table } from "../table.ts";

export const queueTable = table({
  name: "queue",
  columns: {
    id: "integer",
    name: "text",
    paused: "boolean",
    attempts: "integer",
    most: "integer?",
    group_most: "integer?",
    group_rate: "integer?",
    group_per: "integer?",
    ordered: "boolean",
  },
  key: ["name"],
  unique: [["id"]],
});

export const readyTable = table({
  name: "queue_ready",
  columns: {
    queue: "integer",
    priority: "integer",
    attempt: "integer",
    id: "integer",
    at: "moment",
    key: "text?",
    payload: "text",
  },
  key: ["queue", "priority", "id"],
});

export const groupedTable = table({
  name: "queue_grouped",
  columns: {
    queue: "integer",
    priority: "integer",
    attempt: "integer",
    id: "integer",
    at: "moment",
    grp: "text",
    key: "text?",
    payload: "text",
  },
  key: ["queue", "grp", "priority", "id"],
});

export const delayedTable = table({
  name: "queue_delayed",
  columns: {
    queue: "integer",
    priority: "integer",
    attempt: "integer",
    id: "integer",
    at: "moment",
    run_at: "moment",
    key: "text?",
    grp: "text?",
    payload: "text",
  },
  key: ["queue", "run_at", "id"],
  indexes: [["id"]],
});

export const failedTable = table({
  name: "queue_failed",
  columns: {
    queue: "integer",
    id: "integer",
    priority: "integer",
    attempt: "integer",
    at: "moment",
    failed_at: "moment",
    key: "text?",
    grp: "text?",
    payload: "text",
    error: "text",
  },
  key: ["queue", "id"],
});

export const groupTable = table({
  name: "queue_group",
  columns: {
    queue: "integer",
    grp: "text",
    running: "integer",
    since: "moment?",
    started: "integer",
    next: "moment?",
    head: "integer?",
    head_priority: "integer?",
    floor: "integer?",
    floor_priority: "integer?",
  },
  key: ["queue", "grp"],
});

export const keyTable = table({
  name: "queue_key",
  columns: { queue: "integer", key: "text", job: "integer" },
  key: ["queue", "key"],
});

export const workerTable = table({
  name: "queue_worker",
  columns: {
    id: "integer",
    queue: "integer",
    beat: "moment",
    since: "moment",
    ttl: "integer",
    lock: "integer?",
    name: "text?",
  },
  key: ["id"],
});

export const leaseTable = table({
  name: "queue_lease",
  columns: {
    id: "integer",
    worker: "integer",
    queue: "integer",
    counted: "boolean",
    size: "integer",
    done: "integers?",
    jobs: "text",
    since: "moment?",
  },
  key: ["id"],
  indexes: [["queue", "worker"]],
});

export const markTable = table({
  name: "queue_mark",
  columns: { lease: "integer", place: "integer" },
  key: ["lease", "place"],
});

export const queueTables: readonly Table[] = [
  queueTable,
  readyTable,
  groupedTable,
  delayedTable,
  failedTable,
  groupTable,
  keyTable,
  workerTable,
  leaseTable,
  markTable,
];

export type StoredWorker = RowOf<typeof workerTable>;
