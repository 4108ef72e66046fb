/** Three questions, and the answer with its code: `holdfast choose` as a part of a page. */
import { withBase } from "vitepress";
import { computed, defineComponent, h, reactive } from "vue";
import { type Asked, choose, questions } from "../../../packages/cli/src/choose/index.ts";

export const Chooser = defineComponent({
  name: "Chooser",
  setup() {
    const asked: Asked = reactive({ what: "limit", long: "statements", database: "postgres" });
    const answer = computed(() => choose(asked));
    const question = ({ name, text, choices }: (typeof questions)[number]) =>
      h("label", [
        h("span", text),
        h(
          "select",
          {
            name,
            value: asked[name],
            onChange: (event: Event) =>
              Object.assign(asked, { [name]: (event.target as HTMLSelectElement).value }),
          },
          choices.map((choice) => h("option", { key: choice.name, value: choice.name }, choice.text)),
        ),
      ]);
    return () => {
      const { use, why, code, install, note, page } = answer.value;
      return h("form", { class: "chooser", onSubmit: (event: Event) => event.preventDefault() }, [
        ...questions.map(question),
        h("div", { class: "answer", "aria-live": "polite" }, [
          h("p", [h("strong", use), " ", why]),
          ...(code.includes("holdfast") ? [h("pre", [h("code", install)])] : []),
          h("pre", [h("code", code)]),
          ...(note === undefined ? [] : [h("p", note)]),
          h("p", [h("a", { href: withBase(`/${page.replace(/\.md(?=#|$)/, "")}`) }, "More about it")]),
        ]),
      ]);
    };
  },
});
