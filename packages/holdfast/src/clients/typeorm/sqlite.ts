/**
 * SQLite through TypeORM on better-sqlite3. All of a DataSource's work goes through one QueryRunner on one handle, where
 * whatever runs during a transaction becomes part of it, whoever sent it. So ours get a runner of their own, and what is
 * sent through the other one waits meanwhile.
 */
import type { Purpose, Seen } from "../../seam/database.ts";
import { UsageError, message } from "../../seam/errors.ts";
import { observeMethod } from "../observe.ts";
import { sleep } from "../../waiting/wait.ts";
import { type LentHandle, type Send, type SqliteStatements, sendOn } from "../sqlite-lent.ts";

interface Handle extends SqliteStatements {
  readonly inTransaction: boolean;
}

interface Driver {
  readonly databaseConnection?: Handle;
  createQueryRunner(mode: "master"): Runner;
}

interface Runner {
  readonly broadcaster: { broadcast(event: string): Promise<void> };
  manager: object;
  isReleased: boolean;
  isTransactionActive: boolean;
  transactionDepth: number;
  query(...args: unknown[]): Promise<unknown>;
}

interface DataSource {
  driver: object;
  createEntityManager?(runner: object): object;
}

/** Whoever has the handle now, if it is one of ours. */
interface Gate {
  closed: Promise<void> | undefined;
}

const gates = new WeakMap<object, Gate>();

function gateOf(runner: Runner): Gate {
  const known = gates.get(runner);
  if (known) return known;
  const gate: Gate = { closed: undefined };
  gates.set(runner, gate);
  const send = runner.query.bind(runner);
  runner.query = async (...args) => {
    while (gate.closed) await gate.closed;
    return send(...args);
  };
  return gate;
}

const pollMs = 2;

export class TypeormSqlite {
  readonly #dataSource: DataSource;
  readonly #watching = new Map<Seen, () => void>();
  #shared: Runner | undefined;

  constructor(dataSource: DataSource) {
    this.#dataSource = dataSource;
  }

  get #driver(): Driver {
    return this.#dataSource.driver as Driver;
  }

  get handle(): Handle {
    const { databaseConnection } = this.#driver;
    if (databaseConnection) return databaseConnection;
    throw new UsageError(
      "fromTypeorm: the DataSource is not connected; call `await dataSource.initialize()` first",
    );
  }

  /** Another one after the DataSource has been initialized again. */
  get shared(): Runner {
    const runner = this.#driver.createQueryRunner("master");
    if (runner === this.#shared) return runner;
    gateOf(runner);
    this.#shared = runner;
    for (const seen of this.#watching.keys()) this.observe(seen);
    return runner;
  }

  observe(seen: Seen): () => void {
    this.#watching.get(seen)?.();
    this.#watching.set(seen, observeMethod(this.shared, "query", seen));
    return () => {
      this.#watching.get(seen)?.();
      this.#watching.delete(seen);
    };
  }

  async lend({ use, signal }: Purpose): Promise<LentHandle<object>> {
    const { handle, shared } = this;
    const gate = gateOf(shared);
    // The caller's own transactions have no end that could be waited for.
    while (gate.closed || shared.isTransactionActive || handle.inTransaction) await sleep(pollMs, signal);
    let open!: () => void;
    gate.closed = new Promise((resolve) => (open = resolve));
    try {
      const runner = this.#runnerLike(shared);
      return {
        native: runner.manager,
        send: use === "transaction" ? telling(runner, sendOn(handle)) : sendOn(handle),
        giveBack() {
          runner.isReleased = true;
          gate.closed = undefined;
          open();
        },
      };
    } catch (error) {
      gate.closed = undefined;
      open();
      throw error;
    }
  }

  /** One that is in a transaction, as far as TypeORM is concerned. */
  #runnerLike(shared: Runner): Runner {
    const Runners = shared.constructor as new (driver: Driver) => Runner;
    const runner = new Runners(this.#driver);
    runner.isTransactionActive = true;
    runner.transactionDepth = 1;
    runner.manager = this.#dataSource.createEntityManager?.(runner) ?? {};
    return runner;
  }
}

/** Tells subscribers what TypeORM's own methods would tell them. */
function telling(runner: Runner, send: Send): Send {
  let asked = false;
  const tell = (event: string) => runner.broadcaster.broadcast(event);
  return async (text, values) => {
    switch (text) {
      case "BEGIN IMMEDIATE":
      case "BEGIN DEFERRED": {
        if (!asked) await tell("BeforeTransactionStart");
        asked = true;
        const begun = await send(text, values);
        asked = false;
        await tell("AfterTransactionStart");
        return begun;
      }
      case "COMMIT": {
        if (!runner.isTransactionActive)
          throw new UsageError(
            "The body has ended the transaction by itself; Holdfast commits when the body returns",
          );
        if (runner.transactionDepth > 1)
          throw new UsageError(
            "The body has left a transaction open inside of this one, so nothing was committed",
          );
        // If readers are in the way, it is sent again.
        if (!asked) await tell("BeforeTransactionCommit");
        asked = true;
        const ended = await send(text, values);
        runner.isTransactionActive = false;
        runner.transactionDepth = 0;
        await tell("AfterTransactionCommit").catch((error: unknown) => {
          // Not to be retried, whatever it is.
          throw new UsageError(
            `Committed, but a subscriber failed after that: ${message(error)}`,
            "HF_USAGE",
            error,
          );
        });
        return ended;
      }
      case "ROLLBACK": {
        if (!runner.isTransactionActive) return send(text, values);
        // What they throw must not keep it from being rolled back.
        await tell("BeforeTransactionRollback").catch(() => {});
        const ended = await send(text, values);
        runner.isTransactionActive = false;
        await tell("AfterTransactionRollback").catch(() => {});
        return ended;
      }
      default:
        return send(text, values);
    }
  };
}
