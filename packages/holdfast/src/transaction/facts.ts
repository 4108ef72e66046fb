import type { Capabilities } from "../seam/capabilities.ts";
import type { Connection, Database } from "../seam/database.ts";
import { HoldfastError } from "../seam/errors.ts";
import type { Common } from "./agreement.ts";
import { withConnection } from "./one-shot.ts";
import type { WrongConnectionGuard } from "./wrong-connection.ts";

/** What an instance knows of its database: asked when it is first needed, and again if it may have changed. */
export class Facts {
  readonly #common: Common;
  readonly #sender: {
    readonly database: Database<unknown, Connection>;
    readonly wrongConnection: WrongConnectionGuard;
  };
  #asking: Promise<Capabilities> | undefined;

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
    return this.#common.agreed();
  }

  /** One asks; whoever comes meanwhile waits for the answer, or asks again if the first one was cut off. */
  async #ask(connection: Connection | undefined, free: boolean): Promise<Capabilities> {
    const asking = this.#asking;
    if (asking) {
      try {
        return await asking;
      } catch (error) {
        if (error instanceof HoldfastError) throw error;
      }
    }
    this.#asking = connection
      ? this.#common.ask(connection, free)
      : withConnection(this.#sender, (c) => this.#common.ask(c, true));
    try {
      return await this.#asking;
    } finally {
      this.#asking = undefined;
    }
  }
}
