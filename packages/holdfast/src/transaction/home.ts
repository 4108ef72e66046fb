/** Whether a transaction of the client's own is on the database of the instance that is to take part in it. */
import type { Connection } from "../seam/database.ts";
import { NotInTransactionError } from "../seam/errors.ts";
import { askedQuickly } from "./holders.ts";
import type { Instance } from "./instance.ts";

export class Home<Native, C extends Connection> {
  readonly #context: Instance<Native, C>;
  /** Sessions that lead here. */
  readonly #here = new WeakSet<object>();

  constructor(context: Instance<Native, C>) {
    this.#context = context;
  }

  /** Throws if it is on another one. Asks nothing if the client's settings say that it is this one. */
  async check(native: Native, connection: C): Promise<void> {
    const { engine, elsewhere, room } = this.#context.database;
    const session = elsewhere?.call(this.#context.database, native);
    if (!session || !engine.whereabouts || this.#here.has(session)) return;
    const ask = engine.whereabouts.bind(engine);
    const theirs = await ask(connection);
    if (theirs === undefined) return;
    const { out, max } = room?.call(this.#context.database) ?? {};
    // Nobody waits for a connection while holding one: the next call asks.
    if (out !== undefined && max !== undefined && out >= max) return;
    const [ours] = await askedQuickly(this.#context, async (own) => [await ask(own)]);
    if (ours === undefined) return;
    if (ours !== theirs)
      throw new NotInTransactionError(
        `it is on another database (${theirs}) than this instance (${ours}): what is done there is not seen here`,
      );
    this.#here.add(session);
  }
}
