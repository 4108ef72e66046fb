/**
 * Detects a process that waits for itself. A synchronous client blocks the process while another connection writes. If that
 * connection belongs to a transaction of the same process, both wait until the client's busy timeout is over. Afterwards a warning
 * names the place of the transaction.
 */
import { callSites } from "../context/call-site.ts";
import { emit } from "../events/events.ts";
import { StalledError } from "../seam/errors.ts";

/** How often to look whether timers are late. */
const lookMs = 250;
/** A shorter wait may be a busy machine's. */
const leastMs = 1000;
/** Who waits uses hardly any processor: a loop that computes is something else. */
const mostBusy = 0.5;
/** SQLite waits by sleeping again and again. A process that a busy machine gives no turn does not sleep. */
const leastSleeps = 8;

interface Look {
  readonly at: number;
  readonly cpuMs: number;
  readonly sleeps: number;
}

function look(): Look {
  const { userCPUTime, systemCPUTime, voluntaryContextSwitches } = process.resourceUsage();
  const cpuMs = (userCPUTime + systemCPUTime) / 1000;
  return { at: performance.now(), cpuMs, sleeps: voluntaryContextSwitches };
}

/** Transactions that are open. */
const open = new Set<{ stalledMs: number }>();
const told = new Set<string>();
const mostTold = 1000;
let last: Look | undefined;
let timer: NodeJS.Timeout | undefined;

function check(): void {
  if (!last) return;
  const late = performance.now() - last.at - lookMs;
  if (late < leastMs) return;
  const now = look();
  const busy = (now.cpuMs - last.cpuMs) / (now.at - last.at);
  const sleeps = now.sleeps - last.sleeps;
  last = now;
  if (busy < mostBusy && sleeps >= leastSleeps)
    for (const transaction of open) transaction.stalledMs = Math.max(transaction.stalledMs, late);
}

function report(stalledMs: number): void {
  const { place } = callSites.here(report);
  emit("holdfast:transaction:stalled", () => ({ stalledMs, transaction: place }));
  const known = String(place);
  if (told.has(known) || told.size >= mostTold) return;
  told.add(known);
  const error = new StalledError(stalledMs, place);
  process.emitWarning(error.message, { type: error.name, code: error.code });
}

/**
 * Watches a transaction from now until the returned function is called. Call it from a function that the caller of the transaction
 * awaits: then the stack names the caller's place. To note the place of every transaction would cost a tenth of a short one.
 */
export function watchForStalls(): () => void {
  const transaction = { stalledMs: 0 };
  if (!timer) {
    last = look();
    timer = setInterval(() => {
      check();
      if (open.size > 0) {
        last = look();
        return;
      }
      clearInterval(timer);
      timer = last = undefined;
    }, lookMs);
    timer.unref();
  }
  open.add(transaction);
  return () => {
    // It may end before timers get their turn.
    check();
    open.delete(transaction);
    if (transaction.stalledMs > 0) report(transaction.stalledMs);
  };
}
