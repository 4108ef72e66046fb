/** A schedule that was recorded, all at once or step by step. */
import { computed, defineComponent, h, ref } from "vue";
import type { Recorded } from "../../record.ts";

const files = import.meta.glob<Recorded>("../../schedules/*.json", { eager: true, import: "default" });
const recorded = (name: string): Recorded => {
  const found = files[`../../schedules/${name}.json`];
  if (found === undefined) throw new Error(`There is no schedule ${name}`);
  return found;
};

type Turn = Recorded["turns"][number];

/** What there is to say of a step, in a sentence. */
function remark(turn: Turn): string {
  if (turn.waitsFor.length > 0) {
    const others = turn.waitsFor.join(" and ");
    return turn.error === undefined
      ? `${turn.actor} has to wait here until ${others} has ended.`
      : `${turn.actor} waits for ${others}, and is ended by the server.`;
  }
  if (turn.error !== undefined) return `The server refuses it: ${turn.error}.`;
  if (turn.stale) {
    return `${turn.actor} will act on this, and by then it is out of date.`;
  }
  if (turn.switched) return `${turn.actor} gets its turn, in the middle of what the other one does.`;
  return "";
}

export const Schedule = defineComponent({
  name: "Schedule",
  props: { name: { type: String, required: true } },
  setup(props) {
    const schedule = recorded(props.name);
    const last = schedule.turns.length;
    /** How many steps have been taken. */
    const at = ref(last);
    const current = computed(() => schedule.turns[at.value - 1]);
    const go = (step: number) => (at.value = Math.min(last, Math.max(0, step)));
    const onKeydown = (event: KeyboardEvent) => {
      const step = { ArrowRight: at.value + 1, ArrowLeft: at.value - 1, Home: 1, End: last }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      go(step);
    };
    const button = (text: string, step: number, disabled: boolean) =>
      h("button", { type: "button", disabled, onClick: () => go(step) }, text);
    const row = (turn: Turn, i: number) => {
      const column = schedule.actors.indexOf(turn.actor);
      const state = i + 1 > at.value ? "later" : i + 1 === at.value && at.value < last ? "now" : "past";
      return h(
        "li",
        { key: turn.n, class: ["turn", state, turn.stale && "stale", turn.error !== undefined && "failed"] },
        [
          h("span", { class: "number" }, i + 1),
          h("div", { class: "statement", style: { gridColumn: column + 2 }, "data-actor": turn.actor }, [
            h("span", { class: ["actor", `actor-${column}`] }, turn.actor),
            h("code", turn.statement),
            turn.result === "" ? undefined : h("span", { class: "result" }, `→ ${turn.result}`),
            turn.waitsFor.length > 0
              ? h("span", { class: "note" }, `waits for ${turn.waitsFor.join(", ")}`)
              : undefined,
            turn.stale ? h("span", { class: "note" }, "stale") : undefined,
            turn.error === undefined ? undefined : h("span", { class: "note" }, turn.error),
          ]),
        ],
      );
    };
    const verdict = () => [
      h("strong", `✗ ${schedule.error}`),
      schedule.fix === "" ? undefined : h("span", ` ${schedule.fix}`),
    ];
    return () =>
      h(
        "figure",
        {
          class: "schedule",
          style: { "--actors": schedule.actors.length },
          tabindex: 0,
          "aria-label": `Schedule: ${schedule.title}`,
          onKeydown,
        },
        [
          h("figcaption", [
            h("span", { class: "title" }, schedule.title),
            h("span", { class: "steps" }, [
              at.value === last
                ? h("button", { type: "button", class: "play", onClick: () => go(1) }, "Step through")
                : undefined,
              ...(at.value === last
                ? []
                : [
                    button("Back", at.value - 1, at.value <= 1),
                    h("span", { class: "at" }, `${at.value} of ${last}`),
                    button("Next", at.value + 1, false),
                    button("All", last, false),
                  ]),
            ]),
          ]),
          h("ol", { class: "turns" }, [
            h("li", { class: "turn heads", "aria-hidden": true }, [
              h("span", { class: "number" }),
              ...schedule.actors.map((actor, i) =>
                h("span", { class: ["actor", `actor-${i}`], style: { gridColumn: i + 2 } }, actor),
              ),
            ]),
            ...schedule.turns.map(row),
          ]),
          h(
            "p",
            { class: ["verdict", at.value === last ? "end" : "between"], "aria-live": "polite" },
            at.value === last || current.value === undefined
              ? verdict()
              : remark(current.value) || `${current.value.actor} goes on.`,
          ),
        ],
      );
  },
});
