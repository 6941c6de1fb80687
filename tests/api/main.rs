//! What a real API server takes, fills in, shows and forbids, of everything that `deploy/` installs in it.

mod agree;
mod deploy;
mod rights;
mod rules;
mod server;
mod shown;

use agree::{
    every_rule_is_kept_by_the_server_and_by_the_agent, f35_addresses_are_judged_alike,
    whatever_comes_is_judged_alike,
};
use deploy::{
    the_agent_runs_with_the_rights_of_the_lab, the_base_says_what_it_must,
    the_overlay_changes_image_and_level, the_uninstall_job_is_the_agent_on_its_way_out,
};
use rights::{
    a_token_of_no_node_writes_nothing, an_agent_writes_about_its_own_node_and_nothing_else,
    tenants_write_policies_and_no_attachments, the_controller_writes_statuses_and_nothing_else,
};
use shown::{
    columns_say_how_a_policy_is_doing, defaults_are_filled_in, f46_wait_is_not_content_with_an_old_answer,
    objects_are_read_as_they_are_written, objects_of_a_node_are_selected, what_must_stay_stays,
};

holdfast_tests::suite!(needs [ApiServer];
    every_rule_is_kept_by_the_server_and_by_the_agent,
    f35_addresses_are_judged_alike,
    whatever_comes_is_judged_alike,
    defaults_are_filled_in,
    what_must_stay_stays,
    objects_are_read_as_they_are_written,
    objects_of_a_node_are_selected,
    columns_say_how_a_policy_is_doing,
    f46_wait_is_not_content_with_an_old_answer,
    an_agent_writes_about_its_own_node_and_nothing_else,
    a_token_of_no_node_writes_nothing,
    the_controller_writes_statuses_and_nothing_else,
    tenants_write_policies_and_no_attachments,
    the_base_says_what_it_must,
    the_agent_runs_with_the_rights_of_the_lab,
    the_overlay_changes_image_and_level,
    the_uninstall_job_is_the_agent_on_its_way_out,
);
