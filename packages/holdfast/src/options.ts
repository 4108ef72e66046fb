import { type Strategy, strategies } from "./seam/capabilities.ts";
import type { Isolation, Wait } from "./seam/database.ts";
import { UsageError } from "./seam/errors.ts";
import { checkNames } from "./input/options.ts";
import { type Defaults, checkIsolation } from "./transaction/plan.ts";
import { type RetryOptions, retryPolicy } from "./transaction/retry.ts";
import { type WrongConnectionMode, wrongConnectionModes } from "./transaction/wrong-connection.ts";
import { checkWait, milliseconds } from "./waiting/wait.ts";
import type { HazardMode, SlowOptions } from "./watch/options.ts";

export interface HoldfastOptions {
  /** How long calls wait for locks unless they say otherwise. Default 5,000 ms. */
  readonly wait?: Wait;
  /** How long transactions may take unless they say otherwise. Default 60,000 ms. */
  readonly deadline?: number;
  readonly isolation?: Isolation;
  readonly retry?: RetryOptions | false;
  /**
   * Names of keys as the server's list of sessions, errors and events show them. `false`: not shown on the
   * server; a function: what to show instead, e.g. without user ids. Default: the names as they are.
   */
  readonly names?: false | ((name: string) => string);
  /**
   * How locks of transactions are kept, where the server has a choice: "lock row" keeps them as rows of a table
   * instead of advisory locks. It is written down in the database, where its tables are (`hf.migrate()`), and an instance
   * that was told otherwise is refused (`StrategyError`). Default: what is written down; else what the server is found to hold.
   */
  readonly strategy?: Strategy;
  /**
   * What to do about a statement that goes through the outer client inside of a transaction's body, where the client
   * lets it be seen: "warn" (once per place), "throw" (for tests), or nothing. Default "warn".
   */
  readonly wrongConnection?: WrongConnectionMode;
  /**
   * What to do about a request, a timer, a process, … that a transaction waits for while it holds locks, and about locks that
   * are taken in different orders: "warn" (once per place), "throw" (for tests: the transaction fails), "count" (events and
   * metrics only), or nothing. Default "warn", and "count" if NODE_ENV is "production".
   */
  readonly hazards?: HazardMode;
  /** After how many milliseconds a transaction that holds locks is told of as slow. `false`: never. */
  readonly slow?: SlowOptions | false;
  /**
   * Where Holdfast keeps its own tables: a schema of PostgreSQL, elsewhere what their names begin with. Applications that share a
   * database and have different ones share no locks either. Everybody who works together has the same. Default "holdfast".
   */
  readonly schema?: string;
  /**
   * This instance is about one of several databases on purpose, by itself: a tool that looks at it, or mends it. Without it, an instance
   * that is not of `sharded` is refused where `sharded` keeps something.
   */
  readonly oneShard?: boolean;
  /**
   * Accepts a server that another one feeds by replication. Say so if every process that locks or counts connects to this server, e.g.
   * because it replicates other tables only. Default: locks and patterns are refused there (`HF_REPLICA`).
   */
  readonly acceptReplica?: boolean;
  /** A file to which the order of locks is added, for `holdfast order`. Default: what HOLDFAST_ORDER says. */
  readonly orderFile?: string;
}

const optionNames = new Set([
  "wait",
  "deadline",
  "isolation",
  "retry",
  "names",
  "strategy",
  "wrongConnection",
  "hazards",
  "slow",
  "schema",
  "oneShard",
  "acceptReplica",
  "orderFile",
]);

/** All but what is checked by whoever goes by it. */
export function checkOptions(options: HoldfastOptions): void {
  checkNames("holdfast", options, optionNames);
  const { names, strategy, wrongConnection } = options;
  if (names !== undefined && names !== false && typeof names !== "function")
    throw new UsageError("names must be false or a function");
  if (strategy !== undefined && !strategies.includes(strategy))
    throw new UsageError(`strategy must be one of ${strategies.map((each) => `"${each}"`).join(", ")}`);
  if (wrongConnection !== undefined && !wrongConnectionModes.includes(wrongConnection))
    throw new UsageError(
      `wrongConnection must be one of ${wrongConnectionModes.map((each) => `"${each}"`).join(", ")}`,
    );
}

export function checkDefaults({ wait, deadline, isolation, retry }: HoldfastOptions): Defaults {
  return {
    wait: wait === undefined ? 5000 : checkWait(wait),
    deadlineMs: deadline === undefined ? 60_000 : milliseconds(deadline, "deadline", 1),
    isolation: checkIsolation(isolation ?? "read committed"),
    retry: retryPolicy(retry),
  };
}
