/**
 * NestJS: a module with the instance, limits on handlers, a health indicator, and an end that waits for workers. Nothing of
 * Nest is imported: a dynamic module is an object, and what decorators write down is metadata that Nest reads by these names.
 */
import { Holdfast } from "./holdfast.ts";
import { key } from "./seam/key.ts";
import { UsageError, message } from "./seam/errors.ts";
import { checkNames } from "./input/options.ts";
import {
  type ExecutionContextLike,
  type GuardOptions,
  type LimitOptions,
  quotaGuard,
} from "./quota/http/nestjs.ts";
import { problemOf } from "./quota/http/problem.ts";
import type { Quota } from "./quota/quota.ts";
import type { QuotaSet } from "./quota/set.ts";

export * from "./quota/http/nestjs.ts";

/** As `@nestjs/common` has them: `UseGuards`, `Inject` and `Catch` write these. */
const guardsOf = "__guards__";
const dependenciesOf = "self:paramtypes";
const caughtBy = "__filterCatchExceptions__";

/** The settings, for the guards of `@Limit`. */
const settingsToken = Symbol.for("holdfast:nestjs");

/** For `@Inject(HOLDFAST)`, where the type of a parameter does not say it: in JavaScript, and for interfaces. */
export const HOLDFAST = Symbol.for("holdfast:instance");

export interface HoldfastModuleOptions {
  readonly holdfast: Holdfast<any>;
  /** That of `@nestjs/common`: for `@Limit`, see `quotaGuard`. */
  readonly HttpException?: GuardOptions<unknown>["HttpException"];
  /** When the application has ended, and nothing is under way any more: `() => pool.end()`. */
  readonly close?: () => unknown;
}

export interface HoldfastModuleAsyncOptions {
  readonly imports?: any[];
  readonly inject?: any[];
  readonly useFactory: (...dependencies: any[]) => HoldfastModuleOptions | Promise<HoldfastModuleOptions>;
}

/** As much of `DynamicModule` as there is. */
export interface HoldfastDynamicModule {
  module: typeof HoldfastModule;
  global: true;
  imports: any[];
  providers: any[];
  exports: any[];
}

function checked(options: HoldfastModuleOptions): HoldfastModuleOptions {
  checkNames("HoldfastModule", options, new Set(["holdfast", "HttpException", "close"]));
  if (!(options.holdfast instanceof Holdfast))
    throw new UsageError("HoldfastModule: `holdfast` is an instance, as holdfast(…) makes it");
  return options;
}

/** `imports: [HoldfastModule.forRoot({ holdfast: hf, HttpException, close: () => pool.end() })]` */
// oxlint-disable-next-line typescript/no-extraneous-class -- Nest knows modules by their classes.
export class HoldfastModule {
  static forRoot(options: HoldfastModuleOptions): HoldfastDynamicModule {
    checked(options);
    return HoldfastModule.forRootAsync({ useFactory: () => options });
  }

  static forRootAsync({
    imports = [],
    inject = [],
    useFactory,
  }: HoldfastModuleAsyncOptions): HoldfastDynamicModule {
    return {
      module: HoldfastModule,
      global: true,
      imports,
      providers: [
        {
          provide: settingsToken,
          useFactory: async (...dependencies: unknown[]) => checked(await useFactory(...dependencies)),
          inject,
        },
        {
          provide: Holdfast,
          useFactory: (options: HoldfastModuleOptions) => options.holdfast,
          inject: [settingsToken],
        },
        { provide: HOLDFAST, useExisting: Holdfast },
        {
          provide: HoldfastHealth,
          useFactory: (hf: Holdfast<unknown>) => new HoldfastHealth(hf),
          inject: [Holdfast],
        },
        {
          provide: Ending,
          useFactory: (options: HoldfastModuleOptions) => new Ending(options),
          inject: [settingsToken],
        },
      ],
      exports: [Holdfast, HOLDFAST, HoldfastHealth, settingsToken],
    };
  }
}

/** Nest calls these by their names, with `app.close()`, or on a signal after `app.enableShutdownHooks()`. */
class Ending {
  readonly #options: HoldfastModuleOptions;

  constructor(options: HoldfastModuleOptions) {
    this.#options = options;
  }

  /** Requests are still answered: workers, schedules and leaders end first, and calls that are under way. */
  async beforeApplicationShutdown(): Promise<void> {
    await this.#options.holdfast.close();
  }

  async onApplicationShutdown(): Promise<void> {
    await this.#options.close?.();
  }
}

export type HealthResult<Name extends string = string> = Record<
  Name,
  { status: "up"; ms: number } | { status: "down"; message: string }
>;

/**
 * Whether the database answers, and locks there can be taken. With `@nestjs/terminus`:
 * `health.check([() => indicator.isHealthy("database")])`; without it, `check()` from a controller of yours.
 */
export class HoldfastHealth {
  readonly #hf: Holdfast<unknown>;

  constructor(hf: Holdfast<unknown>) {
    this.#hf = hf;
  }

  async isHealthy<Name extends string = "holdfast">(
    name = "holdfast" as Name,
    options: { readonly timeout?: number } = {},
  ): Promise<HealthResult<Name>> {
    return { [name]: await this.check(options) } as HealthResult<Name>;
  }

  async check({ timeout = 3000 }: { readonly timeout?: number } = {}): Promise<HealthResult[string]> {
    const since = performance.now();
    try {
      // Whether somebody else looks at the same time does not matter: there was an answer.
      await this.#hf.tryLock(key("holdfast", "health"), () => Promise.resolve(), {
        deadline: timeout,
        signal: AbortSignal.timeout(timeout),
        retry: false,
        separate: true,
      });
      return { status: "up", ms: Math.round(performance.now() - since) };
    } catch (error) {
      return { status: "down", message: message(error) };
    }
  }
}

/** What reflect-metadata adds to Reflect. */
interface Metadata {
  getMetadata(name: string, target: object): unknown;
  defineMetadata(name: string, value: unknown, target: object): void;
}

function metadataFor(call: string): Metadata {
  if (!("defineMetadata" in Reflect))
    throw new UsageError(`${call}: import "reflect-metadata" comes first, as in every application of Nest`);
  return Reflect as unknown as Metadata;
}

/** Both of Express and of Fastify. */
interface HttpReply {
  status(code: number): unknown;
  header(name: string, value: string): unknown;
  send(body: unknown): unknown;
}

export interface HoldfastFilterOptions {
  /** Is told of each error that is answered with 503. */
  readonly onTrouble?: (error: unknown) => void;
}

/**
 * Answers errors of Holdfast with the status that they mean, as `problemOf` has it: 404 for an unknown SKU, 409 for one that is sold out,
 * 429 with `Retry-After` for a quota, 503 if the database is away. `app.useGlobalFilters(new HoldfastFilter())`, or with `@UseFilters`.
 * Everything else goes on to Nest's own filter.
 */
export class HoldfastFilter {
  readonly #onTrouble: HoldfastFilterOptions["onTrouble"];

  constructor(options: HoldfastFilterOptions = {}) {
    checkNames("HoldfastFilter", options, new Set(["onTrouble"]));
    this.#onTrouble = options.onTrouble;
    // Nest asks `error instanceof` each of these, and takes the next filter if none says yes.
    metadataFor("HoldfastFilter").defineMetadata(caughtBy, [Answerable], HoldfastFilter);
  }

  catch(error: unknown, host: ExecutionContextLike): void {
    const found = problemOf(error);
    // Of a socket, a queue or GraphQL: these have answers of their own.
    if (!found || host.getType() !== "http") throw error;
    if (found.status === 503) this.#onTrouble?.(error);
    const response = host.switchToHttp().getResponse() as HttpReply;
    response.status(found.status);
    for (const [name, value] of Object.entries(found.headers)) response.header(name, value);
    response.send(found.body);
  }
}

/** Whatever has an answer. */
// oxlint-disable-next-line typescript/no-extraneous-class -- Nest knows what a filter is for by classes.
class Answerable {
  static [Symbol.hasInstance](error: unknown): boolean {
    return problemOf(error) !== undefined;
  }
}

/**
 * `@Limit(uploads, { subject: (request: Request) => request.user.id })` on a handler or on a controller; or with
 * `(hf) => quota(hf, { … })`, of the module's instance. It runs as a guard, after those that were put above it.
 */
export function Limit<Request>(
  of: Quota | QuotaSet | ((hf: Holdfast<any>) => Quota | QuotaSet),
  options: LimitOptions<Request>,
): (target: object, name?: string | symbol, descriptor?: PropertyDescriptor) => void {
  class LimitGuard {
    readonly #guard: ReturnType<typeof quotaGuard>;

    constructor(settings: HoldfastModuleOptions) {
      const { holdfast, HttpException } = settings;
      if (!HttpException)
        throw new UsageError(
          "@Limit: HoldfastModule needs `HttpException`, that of @nestjs/common: forRoot({ holdfast, HttpException })",
        );
      this.#guard = quotaGuard(typeof of === "function" ? of(holdfast) : of, {
        ...options,
        HttpException,
      } as GuardOptions<unknown>);
    }

    canActivate(context: ExecutionContextLike): Promise<boolean> {
      return this.#guard.canActivate(context);
    }
  }
  const { getMetadata, defineMetadata } = metadataFor("@Limit");
  defineMetadata(dependenciesOf, [{ index: 0, param: settingsToken }], LimitGuard);
  return (target, _, descriptor) => {
    const where = (descriptor?.value as object | undefined) ?? target;
    const before = (getMetadata(guardsOf, where) as readonly unknown[] | undefined) ?? [];
    defineMetadata(guardsOf, [...before, LimitGuard], where);
  };
}
