import type { Capabilities, Unsupported } from "../seam/capabilities.ts";
import type { Connection, Database } from "../seam/database.ts";
import { HoldfastError } from "../seam/errors.ts";
import { classify } from "../seam/failure.ts";
import type { Common } from "./agreement.ts";
import { withConnection } from "./one-shot.ts";
import type { WrongConnectionGuard } from "./wrong-connection.ts";

/** So many times in a row: a connection may be lost at BEGIN by chance. */
const tries = 3;
/** Of connections that do not even answer. */
const most = 5;

/** What an instance knows of its database: asked when it is first needed, and again if it may have changed. */
export class Facts {
  readonly #common: Common;
  readonly #sender: {
    readonly database: Database<unknown, Connection>;
    readonly wrongConnection: WrongConnectionGuard;
  };
  #asking: Promise<Capabilities> | undefined;
  #trying: Promise<Unsupported | undefined> | undefined;

  constructor(
    common: Common,
    database: Database<unknown, Connection>,
    wrongConnection: WrongConnectionGuard,
  ) {
    this.#common = common;
    this.#sender = { database, wrongConnection };
  }

  /** `free`: the connection is in no transaction. */
  async probe(connection?: Connection, free = false): Promise<Capabilities> {
    return this.#common.facts ?? this.#ask(connection, free);
  }

  /** Throws if this instance and the others do not agree. */
  async renew(connection?: Connection, free = false): Promise<Capabilities> {
    const trusted = this.#common.trusted;
    if (trusted) return trusted;
    await this.#ask(connection, free);
    await this.#mark(connection, free);
    return this.#common.agreed();
  }

  /** Why no transaction can be opened; undefined: one can. Found out once, by experiment. For a caller that holds no connection. */
  async noTransactions(): Promise<Unsupported | undefined> {
    this.#trying ??= this.#tryTransactions();
    try {
      return await this.#trying;
    } catch (error) {
      this.#trying = undefined;
      throw error;
    }
  }

  async #tryTransactions(): Promise<Unsupported | undefined> {
    const { engine, connect, traits } = this.#sender.database;
    // A client that opens a transaction for each call is refused with it. One that has a single connection would lose that.
    if (!engine.verifyTransactions || !connect || traits.single) return undefined;
    const verify = engine.verifyTransactions.bind(engine);
    const known = await this.probe();
    let gap: Unsupported | undefined;
    let stale = 0;
    for (let left = tries; left > 0;) {
      try {
        gap = await withConnection(this.#sender, (connection) => verify(connection, known));
      } catch (error) {
        // It was dead before: a pool may have several that it does not know of yet.
        if (classify(this.#sender.database, error) !== "lost" || ++stale > most) throw error;
        continue;
      }
      if (!gap) return undefined;
      left--;
    }
    if (gap) this.#common.refuseTransactions(gap);
    return gap;
  }

  /**
   * Throws if others take this database for another one of several. How locks are kept does not matter to an instance that uses it
   * alone. One of several has to know that all of them agree.
   */
  async place(connection?: Connection, free = false): Promise<void> {
    if (this.#common.trusted) return;
    if (this.#common.isOneOfSeveral) return void (await this.renew(connection, free));
    if (this.#common.isPlaced) return;
    const check = (on: Connection) => this.#common.checkPlace(on);
    await (connection ? check(connection) : withConnection(this.#sender, check));
    await this.#mark(connection, free);
  }

  async #mark(connection: Connection | undefined, free: boolean): Promise<void> {
    if (!this.#common.unmarked) return;
    if (connection) await this.#common.mark(connection, free);
    else await withConnection(this.#sender, (on) => this.#common.mark(on, true));
  }

  /**
   * Whoever has a connection asks on it. It never waits for another call's answer: that call may be waiting for a connection,
   * and those that wait for its answer may have all of them. Calls without a connection share one question.
   */
  async #ask(connection: Connection | undefined, free: boolean): Promise<Capabilities> {
    if (connection) return this.#common.ask(connection, free);
    const asking = this.#asking;
    if (asking) {
      try {
        return await asking;
      } catch (error) {
        if (error instanceof HoldfastError) throw error;
      }
    }
    this.#asking = this.#askAlone();
    try {
      return await this.#asking;
    } finally {
      this.#asking = undefined;
    }
  }

  async #askAlone(): Promise<Capabilities> {
    const ask = () => withConnection(this.#sender, (connection) => this.#common.ask(connection, true));
    const facts = await ask();
    return (await this.#common.place()) ? ask() : facts;
  }
}
